"""`python -m fullshard`: the command, where its script is not on the path."""

from fullshard.commands.cli import main

if __name__ == "__main__":
    main()
