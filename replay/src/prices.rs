//! Cost of a configuration, and of a million tokens on it, in US dollars.

use serde::{Deserialize, Serialize};

/// Prices of hardware in US dollars. Memory and storage are priced by the month, as they are sold.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Prices {
    /// An hour of one GPU, including its share of the machine except the items below.
    pub gpu_hour: f64,
    /// A gigabyte of host memory for a month.
    pub host_gb_month: f64,
    /// A gigabyte of L3 for a month.
    pub l3_gb_month: f64,
}

/// Cost of a replayed configuration, in US dollars.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spend {
    /// All of it for an hour.
    pub per_hour: f64,
    /// Of that, GPUs.
    pub gpu_per_hour: f64,
    /// Of that, host memory for the host tier.
    pub host_per_hour: f64,
    /// Of that, L3; the peak usage if it is unlimited.
    pub l3_per_hour: f64,
    /// Cost of a million tokens of prompts and answers.
    pub per_million_tokens: f64,
    /// Cost of a million answer tokens, if prompts are free.
    pub per_million_output_tokens: f64,
}

/// Billable resources.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bill {
    pub(crate) gpus_per_hour: f64,
    pub(crate) host_bytes: f64,
    pub(crate) l3_bytes: f64,
    pub(crate) prompt_tokens: u64,
    pub(crate) output_tokens: u64,
    pub(crate) seconds: f64,
}

const MONTH_HOURS: f64 = 730.0;

impl Default for Prices {
    fn default() -> Self {
        Self { gpu_hour: 3.2, host_gb_month: 2.5, l3_gb_month: 0.1 }
    }
}

impl Prices {
    pub(crate) fn spend(&self, bill: &Bill) -> Spend {
        let gpu_per_hour = bill.gpus_per_hour;
        let per_hour = |bytes: f64, month: f64| bytes / 1e9 * month / MONTH_HOURS;
        let host_per_hour = per_hour(bill.host_bytes, self.host_gb_month);
        let l3_per_hour = per_hour(bill.l3_bytes, self.l3_gb_month);
        let whole = gpu_per_hour + host_per_hour + l3_per_hour;
        let per_million =
            |tokens: u64| whole * bill.seconds / 3600.0 / (tokens.max(1) as f64 / 1e6);
        Spend {
            per_hour: whole,
            gpu_per_hour,
            host_per_hour,
            l3_per_hour,
            per_million_tokens: per_million(bill.prompt_tokens + bill.output_tokens),
            per_million_output_tokens: per_million(bill.output_tokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_resources_cost_per_hour() {
        let prices = Prices { gpu_hour: 2.0, host_gb_month: 7.3, l3_gb_month: 0.73 };
        let spend = prices.spend(&Bill {
            gpus_per_hour: 16.0,
            host_bytes: 200e9,
            l3_bytes: 1e12,
            prompt_tokens: 90_000_000,
            output_tokens: 10_000_000,
            seconds: 1800.0,
        });
        assert!((spend.gpu_per_hour - 16.0).abs() < 1e-9);
        assert!((spend.host_per_hour - 2.0).abs() < 1e-9);
        assert!((spend.l3_per_hour - 1.0).abs() < 1e-9);
        assert!((spend.per_million_tokens - 19.0 / 2.0 / 100.0).abs() < 1e-9);
        assert!((spend.per_million_output_tokens - 19.0 / 2.0 / 10.0).abs() < 1e-9);
    }
}
