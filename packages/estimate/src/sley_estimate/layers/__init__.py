"""What a layer does when it is called forward and backward: its operators, counted once per distinct layer."""
