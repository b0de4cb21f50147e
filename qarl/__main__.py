"""`python -m qarl`: the command line where the `qarl` script is not on the path."""

from __future__ import annotations

from qarl.cli import main

main()
