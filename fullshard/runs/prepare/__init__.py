"""From a recipe to what a run trains: data, plan, checks of this machine."""
