"""Runs `python -m train_cli`: the command line, or one rank if `train_cli.local_launch` started this process."""

import sys

from train_cli import stopping

if __name__ == "__main__":
    stopping.die_with_launcher()

    if stopping.has_launcher():
        from train_cli.rank import main as rank_main

        stopping.exit_process(rank_main(*sys.argv[1:]))

    from train_cli.main import main

    stopping.exit_process(main())
