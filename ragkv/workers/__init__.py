"""Ingestion by several workers over one store."""
