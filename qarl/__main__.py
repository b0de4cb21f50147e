"""`python -m qarl`: the command line where the `qarl` script is not on the path."""

from __future__ import annotations

from qarl.cli import main

# Whatever starts Python processes of its own (a reward function may) imports the program's main module in each.
if __name__ == "__main__":
    main()
