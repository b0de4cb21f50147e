"""`qarl bench`: how fast this machine rolls out, learns, makes whole steps and single kernel calls."""
