"""What programs are made of: steps, their parts, and their working memory."""
