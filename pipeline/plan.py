def print_plan(*a):
    pass
