"""What an engine must offer, as Protocols, and what both engines share."""
