"""Judges: reward functions that code can check, and the contract that calls them."""

from groupline.rewards.contract import Reward, RewardError, RewardFunction, RunState, Scores
from groupline.rewards.format import naive_think_format, think_format
from groupline.rewards.gym import gym_score
from groupline.rewards.judging import Judging, call_rewards
from groupline.rewards.language import language_share
from groupline.rewards.length import soft_overlong
from groupline.rewards.mathematics import MathVerify, math_verify
from groupline.rewards.number import correct_number, extract_number, same_number, unreadable_answers
from groupline.rewards.per_sample import reward_notes
from groupline.rewards.registry import get_reward, reward_list

__all__ = [
    "Judging",
    "MathVerify",
    "Reward",
    "RewardError",
    "RewardFunction",
    "RunState",
    "Scores",
    "call_rewards",
    "correct_number",
    "extract_number",
    "get_reward",
    "gym_score",
    "language_share",
    "math_verify",
    "naive_think_format",
    "reward_list",
    "reward_notes",
    "same_number",
    "soft_overlong",
    "think_format",
    "unreadable_answers",
]
