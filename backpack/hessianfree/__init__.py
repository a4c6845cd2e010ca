"""Products with Jacobians, Hessians and generalized Gauss-Newton matrices through automatic differentiation, without forming them."""
