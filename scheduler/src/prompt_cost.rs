//! Cost of prompt tokens in a step.

use crate::config::BatchConfig;

/// Cost of prompt tokens from a position on. Tokens behind many others take longer, because they attend to all of
/// them.
pub(crate) fn prompt_cost(config: &BatchConfig, start: u32, tokens: u32) -> u32 {
    let context = u64::from(config.context_tokens);
    match u64::from(start) {
        start if context > 0 && start > context => {
            let cost = (u64::from(tokens) * start).div_ceil(context);
            u32::try_from(cost).unwrap_or(u32::MAX)
        }
        _ => tokens,
    }
}

/// Number of prompt tokens from a position on that have this cost: at least one, unless the cost is 0.
pub(crate) fn tokens_within(config: &BatchConfig, start: u32, cost: u32) -> u32 {
    let context = u64::from(config.context_tokens);
    match u64::from(start) {
        start if context > 0 && start > context && cost > 0 => {
            ((u64::from(cost) * context / start) as u32).max(1)
        }
        _ => cost,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_far_into_a_prompt_cost_more() {
        let config = BatchConfig { context_tokens: 1000, ..BatchConfig::default() };
        assert_eq!((prompt_cost(&config, 1000, 64), tokens_within(&config, 1000, 64)), (64, 64));
        assert_eq!((prompt_cost(&config, 4000, 16), tokens_within(&config, 4000, 64)), (64, 16));
        assert_eq!(tokens_within(&config, 1_000_000, 8), 1);
        let plain = BatchConfig { context_tokens: 0, ..config };
        assert_eq!((prompt_cost(&plain, 4000, 16), tokens_within(&plain, 4000, 64)), (16, 64));
    }
}
