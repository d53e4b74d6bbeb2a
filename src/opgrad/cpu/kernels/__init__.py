"""What runs compiled, a module for each family. Imports the compiler alone."""
