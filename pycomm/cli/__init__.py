"""The command line. A file here (or a package) whose name has no leading underscore is a subcommand of that name."""
