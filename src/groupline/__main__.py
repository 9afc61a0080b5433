"""`python -m groupline`, for launchers: torchrun --nproc-per-node 2 -m groupline train CONFIG."""

from groupline.cli import main

raise SystemExit(main())
