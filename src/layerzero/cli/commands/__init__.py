"""One file for each command, and what some of them share."""
