"""What all of the package uses: arguments and their errors, types, changes that a signal cannot
halve, progress, the machine."""
