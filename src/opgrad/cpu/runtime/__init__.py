"""How plans run: threads, parts, working memory, results, overlap. Imports the compiler and below."""
