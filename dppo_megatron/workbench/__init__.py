"""What is used beside a run: reports, comparison, planning, checks of a machine, the command line. Imports the trainer,
which never imports it, so that a rank loads no plotting and no parser."""
