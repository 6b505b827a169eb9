import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.spark.scheduler.SparkListener;
import org.apache.spark.scheduler.SparkListenerStageSubmitted;
import org.apache.spark.scheduler.SparkListenerTaskEnd;

/**
 * Adds up how long tasks have run, by the scheduler pool of their stage: in a pooled process each key has its own.
 *
 * Compiled by Janino (see spark/java/janino.py): only Java that Janino supports is used.
 */
public final class TaskTimes extends SparkListener {
    /** Stages whose tasks may still end. A cancelled task may end long after its stage. */
    private static final int REMEMBERED_STAGES = 10000;

    private final LinkedHashMap poolOfStage = new LinkedHashMap();
    private final Map milliseconds = new HashMap();

    public synchronized void onStageSubmitted(SparkListenerStageSubmitted event) {
        String pool = event.properties() == null ? null : event.properties().getProperty("spark.scheduler.pool");
        if (pool == null) {
            return;
        }
        poolOfStage.put(Integer.valueOf(event.stageInfo().stageId()), pool);
        if (poolOfStage.size() > REMEMBERED_STAGES) {
            poolOfStage.remove(poolOfStage.keySet().iterator().next());
        }
    }

    public synchronized void onTaskEnd(SparkListenerTaskEnd event) {
        Object pool = poolOfStage.get(Integer.valueOf(event.stageId()));
        if (pool != null && event.taskInfo() != null && event.taskInfo().finished()) {
            milliseconds.put(pool, Long.valueOf(of((String) pool) + event.taskInfo().duration()));
        }
    }

    /** The milliseconds of the tasks of a pool that have ended. */
    public synchronized long of(String pool) {
        Long known = (Long) milliseconds.get(pool);
        return known == null ? 0L : known.longValue();
    }
}
