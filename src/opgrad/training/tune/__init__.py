"""Fine-tuning of language models: adapters, texts as data, runs, and the files that they leave."""
