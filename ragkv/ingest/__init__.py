"""Ingestion by several workers over one store: processes of this machine, actors of Ray."""
