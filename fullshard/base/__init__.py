"""What everything stands on: errors, text, bounded reading of files, status lines, direct I/O. Standard library only."""
