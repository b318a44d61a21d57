"""Device code behind one interface: the torch reference and CPU backend."""
