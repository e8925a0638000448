"""python -m shardloom, as torchrun starts it."""

from shardloom.cli.main import main

if __name__ == "__main__":
    main()
