"""What of the configurations of engines is not part of namespaces, and why."""
