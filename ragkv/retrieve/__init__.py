"""The names of retrieved chunks, and the routing key of a request."""
