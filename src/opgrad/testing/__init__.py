"""What operators are tried on: example arguments, and how far a result may be from the reference."""
