"""Model families. A family is one file with a `FAMILY`; `hybridflow.models.weight_map.FAMILIES` lists them."""
