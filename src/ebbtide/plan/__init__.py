"""Planning: what to do with each absence of a step so that memory fits and little time is lost."""

from ebbtide.plan.bound import Bound as Bound
from ebbtide.plan.bound import lower_bound as lower_bound
from ebbtide.plan.bound import whole_bound as whole_bound
from ebbtide.plan.caution import NO_CAUTION as NO_CAUTION
from ebbtide.plan.caution import Caution as Caution
from ebbtide.plan.frontier import least_peak_bytes as least_peak_bytes
from ebbtide.plan.problem import plain_peak_bytes as plain_peak_bytes
from ebbtide.plan.recipes import find_recipes as find_recipes
from ebbtide.plan.simulate import Outcome as Outcome
from ebbtide.plan.simulate import simulate as simulate
from ebbtide.plan.solve import solve as solve
