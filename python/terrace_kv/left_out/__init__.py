"""Fields of engine configurations that are not part of namespaces, with reasons."""
