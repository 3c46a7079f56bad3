"""The command line tools. One file per subcommand; what a subcommand needs is imported when it runs."""
