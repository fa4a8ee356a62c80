"""Starting ranks. ``run`` starts those of one job, on this host and, started on each, on several."""
