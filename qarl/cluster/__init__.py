"""One run on several processes: the only room that knows process groups."""
