"""The subcommands of `dppo-megatron`, a file each: their options, and which package does the work.

Each has a `DESCRIPTION` or docstring as its help, `add_options(parser)`, and `execute(arguments)`, which returns the
exit code. Help and mistakes must not wait for torch and Megatron, so a command imports what it needs when it runs.
"""
