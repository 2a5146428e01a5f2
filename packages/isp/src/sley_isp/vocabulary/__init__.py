"""A head whose vocabulary the ranks of `wp` share: no rank gathers its weight, and none has all logits."""
