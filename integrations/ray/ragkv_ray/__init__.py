"""Ingestion on Ray: actors of a cluster store the chunks of a dataset."""

from ragkv_ray.actors import precompute_dataset, store_on_ray

__all__ = ["precompute_dataset", "store_on_ray"]
