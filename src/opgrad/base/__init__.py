"""What any program needs: limits, locks, files, the terminal, private names of libraries. Imports no room."""
