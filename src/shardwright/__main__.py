"""python -m shardwright, as torchrun starts it."""

from shardwright.cli.main import main

if __name__ == "__main__":
    main()
