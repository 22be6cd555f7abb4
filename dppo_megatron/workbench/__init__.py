"""Tools around a run: reports, comparison, planning, checks of a machine, the command line. They import the trainer,
which never imports them, so that a rank loads no plotting and no parser."""
