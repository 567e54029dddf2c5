"""Which chunks a namespace has, of which documents, until when."""
