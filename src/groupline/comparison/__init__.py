"""The methods of the family on one task: same start, same problems, same budget, each in a process of its own."""
