//! The activity of instances in Redis, as a method of [`Redis`]: a hash with one report of each instance, written while
//! any instance reads the reports.

use redis::{Value, from_redis_value};
use sluicegate_store::StoreError;

use super::Redis;

/// The reports of instances about their activity.
#[derive(Clone, Debug, Default)]
pub struct SharedActivity {
    /// Whether any instance reads reports at the moment.
    pub is_read: bool,
    /// The report of each instance, by its name. Empty unless the caller reads them.
    pub reports: Vec<(String, Vec<u8>)>,
}

/// Stores a report and returns all reports.
///
/// `KEYS`: a key that exists while any instance reads reports, and the hash of reports. `ARGV`: 1 if the caller reads,
/// the name of the instance, its report (empty for none), and names of instances whose reports are outdated.
const SCRIPT: &str = "
if ARGV[1] == '1' then redis.call('SET', KEYS[1], '', 'EX', 10) end
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
  redis.call('EXPIRE', KEYS[2], 60)
end
for index = 4, #ARGV do redis.call('HDEL', KEYS[2], ARGV[index]) end
return {redis.call('EXISTS', KEYS[1]), ARGV[1] == '1' and redis.call('HGETALL', KEYS[2]) or {}}
";

impl Redis {
    /// Stores the report of this instance if there is one, and returns whether reports are read by any instance. If
    /// `read` is set, returns the reports of all instances, and removes those named in `outdated`.
    ///
    /// # Errors
    ///
    /// Returns an error if Redis does not answer or its reply is invalid.
    pub async fn exchange_activity(
        &self,
        instance: &str,
        report: Option<&[u8]>,
        read: bool,
        outdated: &[String],
    ) -> Result<SharedActivity, StoreError> {
        let mut call = redis::cmd("EVAL");
        call.arg(SCRIPT).arg(2).arg(self.override_key("activity_read")).arg(self.override_key("activity"));
        call.arg(if read { "1" } else { "0" }).arg(instance).arg(report.unwrap_or_default()).arg(outdated);
        let Value::Array(reply) = self.override_command(&call).await? else {
            return Err(StoreError::Rejected);
        };
        let [is_read, reports] = <[Value; 2]>::try_from(reply).map_err(|_| StoreError::Rejected)?;
        let is_read: i64 = from_redis_value(is_read).map_err(|_| StoreError::Rejected)?;
        let reports = from_redis_value(reports).map_err(|_| StoreError::Rejected)?;
        Ok(SharedActivity { is_read: is_read != 0, reports })
    }
}
