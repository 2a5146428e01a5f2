"""How the tensors of a group's exchanges travel: one protocol, and a class for each way, chosen when groups are made."""
