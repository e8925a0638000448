"""Entry point of `python -m shardwright`, which torchrun uses."""

from shardwright.cli.main import main

if __name__ == "__main__":
    main()
