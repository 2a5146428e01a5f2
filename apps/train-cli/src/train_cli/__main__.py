"""`python -m train_cli`, which is also what a launcher starts on every rank."""

from train_cli import lifeline

if __name__ == "__main__":
    lifeline.hold()

    from train_cli.main import main

    lifeline.leave(main())
