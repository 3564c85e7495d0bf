"""`python -m torchtrim` is the command `torchtrim`."""

from torchtrim.cli.main import main

if __name__ == "__main__":
    main()
