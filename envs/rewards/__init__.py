"""What reward functions are made of: checks of answers and code, a judge, weighted sums."""

from sostenuto.envs.later import later as later
from sostenuto.envs.rewards.answers import boxed as boxed
from sostenuto.envs.rewards.answers import last_number as last_number
from sostenuto.envs.rewards.answers import same_number as same_number
from sostenuto.envs.rewards.code import Case as Case
from sostenuto.envs.rewards.code import CodeVerdict as CodeVerdict
from sostenuto.envs.rewards.code import check_code as check_code
from sostenuto.envs.rewards.judge import Judge as Judge
from sostenuto.envs.rewards.math import same_math as same_math
from sostenuto.envs.rewards.sums import weighted as weighted
