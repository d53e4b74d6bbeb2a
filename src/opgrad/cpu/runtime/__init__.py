"""Running compiled kernels: programs, threads, working memory."""
