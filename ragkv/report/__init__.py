"""What happened: the account of an answer or an ingestion, its clock, and its HTML page."""
