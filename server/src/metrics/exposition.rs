//! Writes the figures of a moment into the page that is being made of a registry.

use std::fmt;

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use terrace_engine::TimeHistogram;

/// A page under construction. Names are those that readers see: a counter's ends in `_total`.
#[derive(Debug)]
pub(crate) struct Exposition<'e>(DescriptorEncoder<'e>);

/// How a figure behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// It only grows.
    Counter,
    /// It says how things are.
    Gauge,
}

/// What a figure can be.
pub(crate) trait Value: EncodeCounterValue + EncodeGaugeValue {}

impl<V: EncodeCounterValue + EncodeGaugeValue> Value for V {}

impl<'e> Exposition<'e> {
    pub(crate) fn new(encoder: DescriptorEncoder<'e>) -> Self {
        Self(encoder)
    }

    /// A counter without labels.
    pub(crate) fn counter(&mut self, name: &str, help: &str, value: impl Value) -> fmt::Result {
        self.metric(Kind::Counter, name, help, &[("", value)], "")
    }

    /// A gauge without labels.
    pub(crate) fn gauge(&mut self, name: &str, help: &str, value: impl Value) -> fmt::Result {
        self.metric(Kind::Gauge, name, help, &[("", value)], "")
    }

    /// A metric with one value for each value of a label.
    pub(crate) fn metric<V: Value>(
        &mut self,
        kind: Kind,
        name: &str,
        help: &str,
        values: &[(&str, V)],
        label: &str,
    ) -> fmt::Result {
        let (family, kind_name) = match kind {
            // The format adds the ending to each sample itself.
            Kind::Counter => (name.strip_suffix("_total").unwrap_or(name), MetricType::Counter),
            Kind::Gauge => (name, MetricType::Gauge),
        };
        let mut family = self.0.encode_descriptor(family, help, None, kind_name)?;
        for (of, value) in values {
            match label {
                "" => sample(&mut family, kind, value)?,
                label => sample(&mut family.encode_family(&[(label, *of)])?, kind, value)?,
            }
        }
        Ok(())
    }

    /// Times that the engine has counted.
    pub(crate) fn histogram(
        &mut self,
        name: &str,
        help: &str,
        times: &TimeHistogram,
    ) -> fmt::Result {
        let buckets: Vec<_> = times.buckets().collect();
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        family.encode_histogram::<NoLabelSet>(times.sum_seconds(), times.count(), &buckets, None)
    }
}

fn sample(encoder: &mut MetricEncoder<'_>, kind: Kind, value: &impl Value) -> fmt::Result {
    match kind {
        Kind::Counter => encoder.encode_counter::<NoLabelSet, _, f64>(value, None),
        Kind::Gauge => encoder.encode_gauge(value),
    }
}
