"""`python -m flashxla` is the `flashxla` command."""

from flashxla.cli import main

raise SystemExit(main())
