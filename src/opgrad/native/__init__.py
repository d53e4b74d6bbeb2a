"""Answers Python calls in native code: it compares arguments, finds a plan, takes working memory and runs kernels."""
