"""Schedule: which request, ingestion or idle work uses a model next. Knows no prompt and no row."""
